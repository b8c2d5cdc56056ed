"""Training of the models in ``models`` with jaxpipe: configuration, text data, loop, metrics."""
