"""Trained models from public packages, for `real_models.py`.

Their weights have their authors' licences; they are downloaded for measurements and not shipped.
"""

from models.audio import AUDIO
from models.text import TEXT
from models.vision import VISION
from models.yardstick import YARDSTICK

__all__ = ["MODELS", "YARDSTICK"]
MODELS = (*VISION, *AUDIO, *TEXT)
