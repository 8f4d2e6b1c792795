"""Monitoring of the outbox: figures of the tables, and the dashboard and alert rules for Prometheus and Grafana."""
