"""Monitoring of the inbox: figures of the tables, and the dashboard and alert rules for Prometheus and Grafana."""
