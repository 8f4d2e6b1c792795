from django.contrib import admin

from demo_shop.stock.models import Product, StockMovement

admin.site.register([Product, StockMovement])
