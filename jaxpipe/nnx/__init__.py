"""Flax nnx modules in a pipeline: whole models, and single functions.

`docs/design/005-losses-and-outputs.md` gives the reasons.
"""

from jaxpipe.nnx.functions import axis_split as axis_split
from jaxpipe.nnx.functions import functional as functional
from jaxpipe.nnx.functions import stack as stack
from jaxpipe.nnx.functions import stateful as stateful
from jaxpipe.nnx.models import Converted as Converted
from jaxpipe.nnx.models import model as model
from jaxpipe.nnx.models import update as update
