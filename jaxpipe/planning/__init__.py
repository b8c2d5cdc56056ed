"""The planner: mesh, schedule and options that train a model soonest on given devices.

Only `counting`, `measuring` and `without_devices` import jax.
"""
