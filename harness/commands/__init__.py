"""The command line's verbs, one file each: `register` adds the parser, `run` does the work.

A verb parses and prints; what it computes lives in the module that it calls.
"""
