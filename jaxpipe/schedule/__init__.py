"""Schedules as plain data; imports no jax.

=========================================  =========================================================
`actions`, `placement`                     what a schedule is
`catalog`                                  every schedule by name: `catalog.build`
`gpipe`, `one_f_one_b`, `interleaved`,     generators, one file per family
`breadth_first`, `hanayo`, `zero_bubble`,
`dualpipe`, `chimera`
`building_blocks`, `controllable_memory`   repeated patterns of one microbatch; the search for them
`events`                                   the event machine on which orders are made
`list_scheduling`                          most urgent pass first, which some of them share
`slices`, `auto`                           actions cut into slices of time; orders made for that
`tick_engine`, `tick_search`               the greedy both share, and the search around it
`validate`, `slice_rules`,                 proof that a schedule can run, or an error with the grid
`schedule_types`, `grid`
`simulate`                                 both clocks: free-running and lock-step
`lower`, `table`, `slots`                  the tick table that is executed, and its buffers
`report`, `comparison`                     everything known about one schedule; several side by side
`draw`, `trace`                            text, SVG and PNG; Chrome and Perfetto
`csv_format`, `user`                       PyTorch's CSV of actions; a user's own schedule
=========================================  =========================================================
"""
