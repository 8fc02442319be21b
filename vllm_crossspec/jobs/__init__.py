"""What runs in a process of its own, and how it is started."""
