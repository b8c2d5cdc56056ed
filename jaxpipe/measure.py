"""What the layers of a pipeline cost, and how much memory its step takes, before it runs.

=================  =================================================================================
`layer_costs`      F, B and W of every layer, counted or timed, for `jaxpipe.schedule.partition`
`layer_bytes`      what every layer keeps, for `jaxpipe.schedule.Memory`
`predicted_bytes`  what a training step takes on each device
=================  =================================================================================
"""

from jaxpipe.runtime.measure.costs import layer_bytes, layer_costs
from jaxpipe.runtime.measure.memory import predicted_bytes

__all__ = ["layer_bytes", "layer_costs", "predicted_bytes"]
