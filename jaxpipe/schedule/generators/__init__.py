"""Generators: one file per schedule family, and what several of them are built on.

A generator takes p, ``num_stages``, m, ``num_microbatches``, and often v, ``num_chunks``, all at
least 1; m may be less than p. With ``fused``, where there is a choice, it runs B and W of a
microbatch as one action. It returns a schedule that `jaxpipe.schedule.check` accepts,
named as in `jaxpipe.schedule.catalog`: a fused form's name ends in "-fused". Bubbles and peaks in
flight are in `docs/schedules.md`, whose table the tests prove row by row.
"""
