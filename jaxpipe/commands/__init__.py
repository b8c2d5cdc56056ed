"""The sub-commands of ``jaxpipe``, and what they share."""
