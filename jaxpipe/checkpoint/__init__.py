"""Checkpoints that any pipeline of the same model restores, whole or not at all.

Nothing else in `jaxpipe` imports orbax.
"""

from jaxpipe.checkpoint.checkpoints import LOSS_FILE as LOSS_FILE
from jaxpipe.checkpoint.checkpoints import Checkpoints as Checkpoints
from jaxpipe.checkpoint.checkpoints import Restored as Restored
from jaxpipe.checkpoint.integrity import CHECKSUMS_FILE as CHECKSUMS_FILE
from jaxpipe.checkpoint.integrity import DamagedError as DamagedError
from jaxpipe.checkpoint.integrity import Fetch as Fetch
from jaxpipe.checkpoint.integrity import Found as Found
from jaxpipe.checkpoint.integrity import reading as reading
from jaxpipe.checkpoint.processes import from_first as from_first
