"""What this host has, which torch its cards can run, and what to type next."""
