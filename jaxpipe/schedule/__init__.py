"""Schedules as plain data; imports no jax.

=========================  =========================================================================
`actions`, `placement`     what a schedule is
`catalog`, `built_in`      every schedule by name: `catalog.build`
`problems`                 what is wrong with an argument, as data
`generators`               one file per family; `events` is the machine on which orders are made
`search`                   orders and slices that are searched for, and the disk cache of searches
`check`                    proof that a schedule can run, or an error with the grid
`simulate`, `partition`    both clocks; which layers make a chunk
`lowering`                 the tick table that is executed, and its buffers
`show`                     reports, text, pictures and traces
`formats`                  PyTorch's CSV, JSON, and a user's own schedule
=========================  =========================================================================
"""
