"""An event-driven simulation of plans: their timelines on a cluster."""
