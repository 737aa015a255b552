// What Go's archive/tar, the reader of the container engines, makes of archives.
//
// Reads archives from standard input, each after its length (8 bytes, big endian). Prints a line for each
// member: type flag, size, checksum of the content (CRC-32; 0 for sparse files), name and link name in
// hexadecimal, "sparse" or "whole"; then a line "end" or "error: ...".
package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strings"
)

func main() {
	in := bufio.NewReaderSize(os.Stdin, 1<<20)
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	for {
		var length uint64
		if binary.Read(in, binary.BigEndian, &length) != nil {
			return
		}
		archive := make([]byte, length)
		if _, err := io.ReadFull(in, archive); err != nil {
			panic(err)
		}
		if err := list(bytes.NewReader(archive), out); err != nil {
			fmt.Fprintf(out, "error: %s\n", strings.ReplaceAll(err.Error(), "\n", " "))
		} else {
			fmt.Fprintln(out, "end")
		}
	}
}

func list(archive io.Reader, out io.Writer) error {
	reader := tar.NewReader(archive)
	for {
		header, err := reader.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		form, sum := "whole", crc32.NewIEEE()
		if isSparse(header) {
			form = "sparse"
		} else if _, err := io.Copy(sum, reader); err != nil {
			return err
		}
		fmt.Fprintf(out, "%d %d %d %x. %x. %s\n",
			header.Typeflag, header.Size, sum.Sum32(), header.Name, header.Linkname, form)
	}
}

func isSparse(header *tar.Header) bool {
	for key := range header.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return header.Typeflag == tar.TypeGNUSparse
}
