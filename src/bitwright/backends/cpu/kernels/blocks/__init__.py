"""Products with weights in stored block formats."""
