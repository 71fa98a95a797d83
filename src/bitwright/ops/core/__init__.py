"""Declaration of ops, their registry, the builder and the interpreter."""
