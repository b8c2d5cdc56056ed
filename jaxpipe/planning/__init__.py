"""The planner: mesh, schedule and options that train a model soonest on given devices.

=================  =============================================================================
`devices`          peaks, bandwidths, memory and price of devices and links, with their sources
`sizes`            what a model's layers compute, move and keep; JSON
`plans`            a model spread over devices, its tick tables, and which plans there are
`cost`             seconds of a step and bytes of a device, by part
`search`           why plans are out, the best ones, and the Pareto front
`configurations`   where models come from
`counting`         counts sizes of a model from its trace
`measuring`        measures devices, in place of their data sheets
`without_devices`  traces and compiles for GPUs that are not there
=================  =============================================================================

Only the last three import jax.
"""
