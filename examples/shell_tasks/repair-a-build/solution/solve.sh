#!/bin/sh
set -e
cat > build.sh <<'END'
#!/bin/sh
set -e
cd "$(dirname "$0")"
rm -rf dist
mkdir dist
version=$(sed 's/[\/&]/\\&/g' VERSION)
{
  cat src/header.html
  for part in $(ls src/parts | sort -n); do
    cat "src/parts/$part"
  done
  cat src/footer.html
} | sed "s/@VERSION@/$version/g" > dist/page.html
cd dist
for file in *; do
  echo "$(wc -c < "$file" | tr -d ' ') $file"
done > ../manifest.tmp
mv ../manifest.tmp manifest.txt
END
