from django.contrib import admin

from demo_shop.orders.models import HistoryEntry, Order, Rating

admin.site.register([HistoryEntry, Order, Rating])
