"""`worker doctor`: what would keep this machine from working for a run, each finding with its remedy.

`findings` and `checks` are pure; `probes` ask the machine and the network; `examine` puts them together.
"""
