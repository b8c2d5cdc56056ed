"""``python -m train.prepare [text | images | translation]``: writes data to train on."""
