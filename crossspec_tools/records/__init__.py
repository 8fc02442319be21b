"""What drafters did in real engines, round by round: collecting it, and fitting routers, sizes and costs to it."""
