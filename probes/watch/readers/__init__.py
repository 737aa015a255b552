"""What can be read of a machine again and again, at a cost that doesn't disturb what runs on it."""
