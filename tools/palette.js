// Reduce a picture to a palette: the most frequent colours that differ visibly, and for each pixel the nearest of them.
async ([url, most]) => {
    const CLOSE = 150;
    const bitmap = await createImageBitmap(await (await fetch(url)).blob());
    const { width, height } = bitmap;
    const context = new OffscreenCanvas(width, height).getContext("2d");
    context.drawImage(bitmap, 0, 0);
    const pixels = new Uint32Array(context.getImageData(0, 0, width, height).data.buffer);
    const counts = new Map();
    for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
    const parts = (pixel) => [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
    const distance = (one, other) => one.reduce((sum, part, index) => sum + (part - other[index]) ** 2, 0);
    const palette = [];
    for (const [pixel] of [...counts].sort((one, other) => other[1] - one[1])) {
        const colour = parts(pixel);
        if (palette.length < most && palette.every((other) => distance(colour, other) > CLOSE)) palette.push(colour);
    }
    const nearest = new Map();
    for (const pixel of counts.keys()) {
        const distances = palette.map((other) => distance(parts(pixel), other));
        nearest.set(pixel, distances.indexOf(Math.min(...distances)));
    }
    let rows = "";
    for (let row = 0; row < height; row++) {
        rows += "\0";
        for (let column = 0; column < width; column++) rows += String.fromCharCode(nearest.get(pixels[row * width + column]));
    }
    return { width, height, palette: palette.flat(), rows: btoa(rows) };
}
