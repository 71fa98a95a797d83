"""Reports on graphs, compilations and runs. Nothing else imports them."""
