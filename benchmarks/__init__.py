"""What is measured, against what, and how to run it again: each package and each module that has a `main`
is `python -m benchmarks.<name>`; the others are shared.

Every benchmark states the machine and the sample sizes, repeats alternately what it compares, and ends with one line
of JSON. No test asserts a time; speed is shown here.
"""
