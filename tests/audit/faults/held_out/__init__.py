"""A third of the kinds, drawn by chance from each place before any was written. Who makes probes does not
look in here.

`python -m audit.faults.score --held-out` says how many of them the audit catches, which shows how it does on
faults that it was not made for.
"""
