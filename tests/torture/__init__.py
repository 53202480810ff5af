"""Programs that attack a step for minutes and print a table; ``make torture`` runs them, the tests a small part."""
