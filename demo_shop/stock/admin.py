from django.contrib import admin

from demo_shop.stock.models import Product, Shipment, StockMovement

admin.site.register([Product, Shipment, StockMovement])
