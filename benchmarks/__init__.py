"""What is measured, against what, and how to run it again: each module is `python -m benchmarks.<name>`.

Every benchmark states the machine and the sample sizes, repeats alternately what it compares, and ends with one line
of JSON. No test asserts a time; speed is shown here.
"""
