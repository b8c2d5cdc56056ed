"""The public names that need jax; `jaxpipe` itself imports this file when one of them is used."""

from jaxpipe.runtime import unpipelined as unpipelined
from jaxpipe.runtime import vocabulary as vocabulary
from jaxpipe.runtime.asynchronous import AsyncPipeline as AsyncPipeline
from jaxpipe.runtime.layered import LayeredUpdate as LayeredUpdate
from jaxpipe.runtime.mesh import make_mesh as make_mesh
from jaxpipe.runtime.model import Model as Model
from jaxpipe.runtime.modules import functional as functional
from jaxpipe.runtime.modules import stack as stack
from jaxpipe.runtime.pipeline import Pipeline as Pipeline
