"""Hostile input, at length.

corpus, mutations, line, run      honest submissions with mutated bytes and fields, run through what door and verifier run
served, site, doors               a real coordinator, and both of its doors fuzzed
http_door, described, grpc_door   requests chosen by number; by the API's description; calls of every RPC
raw                               bytes that are no request
"""
