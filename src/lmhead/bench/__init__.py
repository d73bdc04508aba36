"""Speed, memory and errors of the head beside everything else a user could pick.

In:  a task (`losses`, `queries`), a shape of a real model, real data or a generator's.
Out: a `Report`: times by rounds, ratios, peak memory, errors against float64; table, JSON, plot.
May be called by: `cli`, and the scripts of `benchmarks/`.

Read in this order: `shapes`, `task`, `losses`, `queries`, `generator`, `data`, `truth`, `worker`,
`runner`, `report`. The first four load no torch: `lmhead bench --help` is instant.
"""
