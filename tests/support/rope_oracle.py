"""What a rotary embedding means: one pair of one head at a time, in plain Python."""

import cmath
import math

import numpy as np


def frequency(config, pair, turned):
    """One pair's radians per position, case by case as the papers put it."""
    plain = 1 / config.rope_theta ** (2 * pair / turned)
    context, factor = config.original_max_position_embeddings, config.factor
    if config.rope_type == "linear":
        return plain / factor
    if config.rope_type == "longrope":
        is_long = config.context_length > context
        return plain / (config.long_factor if is_long else config.short_factor)[pair]
    if config.rope_type == "llama3":
        wavelength = 2 * math.pi / plain
        if wavelength < context / config.high_freq_factor:
            return plain
        if wavelength > context / config.low_freq_factor:
            return plain / factor
        smooth = (context / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        return (1 - smooth) * plain / factor + smooth * plain
    if config.rope_type == "yarn":
        start, end = (
            turned * math.log(context / (rounds * 2 * math.pi)) / (2 * math.log(config.rope_theta))
            for rounds in (config.beta_fast, config.beta_slow)
        )
        if config.truncate:
            start, end = math.floor(start), math.ceil(end)
        start, end = max(start, 0), min(end, turned - 1)
        ramp = (pair - start) / (end - start) if start != end else pair - start
        scaled = min(1.0, max(0.0, ramp))
        return scaled * plain / factor + (1 - scaled) * plain
    return plain


def rotate(heads, positions, config, factor):
    """Each pair as one complex number, turned by its angle; heads [T, N, H], float64."""
    out = np.array(heads, np.float64)
    turned = int(heads.shape[2] * config.partial_rotary_factor)
    for token, head, pair in np.ndindex(*heads.shape[:2], turned // 2):
        a, b = (2 * pair, 2 * pair + 1) if config.interleaved else (pair, pair + turned // 2)
        angle = float(positions[token]) * frequency(config, pair, turned)
        number = complex(heads[token, head, a], heads[token, head, b]) * cmath.rect(factor, angle)
        out[token, head, a], out[token, head, b] = number.real, number.imag
    return out
