"""The comparisons of the papers, made again: docs/studies, one file each."""
