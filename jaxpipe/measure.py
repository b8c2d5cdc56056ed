"""Costs of a pipeline's layers, memory of its step, the measured timeline, and sizes for plans.

=================  =================================================================================
`layer_costs`      F, B and W of every layer, counted or timed, for `jaxpipe.schedule.partition`
`end_costs`        what embedding and head cost, for the same
`predicted_bytes`  what a training step takes on each device
`timeline`         when the stages of a step run what, measured
`model_sizes`      what a model computes and keeps, for ``jaxpipe plan --sizes``
=================  =================================================================================
"""

from jaxpipe.planning.counting import model_sizes
from jaxpipe.runtime.layer_costs import end_costs, layer_costs
from jaxpipe.runtime.memory import predicted_bytes
from jaxpipe.runtime.timeline import timeline

__all__ = ["end_costs", "layer_costs", "model_sizes", "predicted_bytes", "timeline"]
