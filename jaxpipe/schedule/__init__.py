"""Schedules as plain data; imports no jax.

=========================================  =========================================================
`actions`, `placement`                     what a schedule is
`catalog`                                  every schedule by name: `catalog.build`
`gpipe`, `one_f_one_b`, `interleaved`,     generators, one file a family
`breadth_first`, `hanayo`, `zero_bubble`,
`dualpipe`, `chimera`
`list_scheduling`                          the event-driven scheduler some of them share
`validate`                                 proof that a schedule can run, or an error with the grid
`simulate`                                 both clocks: free-running and lock-step
`report`, `comparison`                     all that is known of one schedule, of several
`draw`, `trace`                            text, SVG and PNG; Chrome and Perfetto
`csv_format`, `user`                       PyTorch's CSV of actions; a user's own schedule
=========================================  =========================================================
"""
