#!/bin/bash
mkdir dist
cat src/header.html > dist/page.html
for part in $(ls src/parts | sort); do
  cat src/$part > dist/page.html
done
cat src/footer.html >> dist/page.html
sed -i "s/@VERSION@/$VERSION/" dist/page.html
cd dist
for file in *; do
  echo $(wc -c $file) $file >> manifest.txt
done
exit 1
