"""Mutation testing: which small errors in a reference does the harness reject?"""
