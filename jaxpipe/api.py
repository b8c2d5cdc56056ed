"""The public names that need jax; `jaxpipe` itself imports this file when one of them is used."""

from jaxpipe import cpu_threads
from jaxpipe.asynchronous.pipeline import AsyncPipeline as AsyncPipeline
from jaxpipe.runtime import unpipelined as unpipelined
from jaxpipe.runtime import vocabulary as vocabulary
from jaxpipe.runtime.host import on_host as on_host
from jaxpipe.runtime.layers.losses import Sum as Sum
from jaxpipe.runtime.layers.losses import Weighted as Weighted
from jaxpipe.runtime.layers.losses import WithLoss as WithLoss
from jaxpipe.runtime.layers.model import Model as Model
from jaxpipe.runtime.layers.slices import Appended as Appended
from jaxpipe.runtime.layout.splits import Joined as Joined
from jaxpipe.runtime.mesh import axes_across_hosts as axes_across_hosts
from jaxpipe.runtime.mesh import make_mesh as make_mesh
from jaxpipe.runtime.new_params import init_params as init_params
from jaxpipe.runtime.new_params import load_params as load_params
from jaxpipe.runtime.options import Options as Options
from jaxpipe.runtime.pipeline import Pipeline as Pipeline

# XLA's threads start with the first array, which may come before a mesh.
cpu_threads.suffice()
