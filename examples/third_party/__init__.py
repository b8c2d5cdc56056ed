"""Models as other people write them: nothing in this folder knows of jaxpipe."""
