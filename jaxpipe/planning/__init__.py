"""The planner: mesh, schedule and options that train a model soonest on given devices.

=================  =============================================================================
`devices`          peaks, bandwidths, memory and price of devices and links, with their sources
`sizes`            what a model's layers compute, move and keep, as a trace counts it; JSON
`traced`           counts that
`calibration`      a device as it was measured, in place of its data sheet; JSON
`measuring`        measures that
`without_devices`  traces and compiles for GPUs that are not there
`programs`         tick tables by name and shape, and how they grow with the microbatches
`memory`           bytes on a device, by part
`step`             seconds of a step, by part, with what computation hides
`candidates`       the plans that there are
`search`           why plans are out, the best ones, and the Pareto front
=================  =============================================================================

Only `traced`, `measuring` and `without_devices` import jax.
"""
