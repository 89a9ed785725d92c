"""From results to pages: what differs from what, answers, a recommendation, pictures."""
