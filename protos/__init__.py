"""Wire schemas and the stubs generated from them (`make protos`)."""
