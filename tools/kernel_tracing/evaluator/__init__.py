"""The evaluator: runs a model's Python with a decided configuration, and records which kernels it would call.

Plain values (numbers, strings, lists, objects, classes, functions) are computed as Python does; tensors keep their
shape and dtype where these are known; everything else is unknown. A test on something unknown takes both branches.
"""
