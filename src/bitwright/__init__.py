"""bitwright makes a trained model smaller and faster, runs it, and proves what that cost."""

__version__ = "0.1.0"
