"""Reports: they read graphs and saved stages, and nothing reads them back."""
