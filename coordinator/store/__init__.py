"""State, all of it, in one relational database. Each module holds the statements of one noun, on a connection.

A caller opens `Database.write()`, which is one transaction, and composes statements inside it; the promises that matter
most (one live lease per sample, one live rollout per sample, trained on at most once, credited once) are constraints of
the schema, so that no code path can break them.
"""
