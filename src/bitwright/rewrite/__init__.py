"""Rewriting: rules as data, a matcher, a driver that terminates, and a trace of what happened."""

from bitwright.rewrite.driver import rewrite
from bitwright.rewrite.match import Match
from bitwright.rewrite.pattern import any_operands
from bitwright.rewrite.rule import Rule
from bitwright.rewrite.trace import Event, Trace

__all__ = ["Event", "Match", "Rule", "Trace", "any_operands", "rewrite"]
