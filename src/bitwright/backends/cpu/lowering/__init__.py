"""The context that all lowerings share, and the build of a program."""
