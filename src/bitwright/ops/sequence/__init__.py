"""Ops over sequences: recurrent layers and linear recurrences."""
